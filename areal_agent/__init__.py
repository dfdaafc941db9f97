"""areal_agent: train agents by asynchronous reinforcement learning."""
