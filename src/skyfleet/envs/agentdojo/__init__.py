"""AgentDojo: the user tasks of its four suites as environments."""
