"""AgentDojo: four suites of tasks that nobody here wrote."""
