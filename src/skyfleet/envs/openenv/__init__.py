"""OpenEnv: a client for its servers and a server for our environments."""
