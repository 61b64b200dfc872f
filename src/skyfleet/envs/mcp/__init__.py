"""MCP, both ways: its servers as envs, our envs as its servers."""
