"""An environment: its tasks, its workflow with the reward, and demonstrations for the tiny model."""
