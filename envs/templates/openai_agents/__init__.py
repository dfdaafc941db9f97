"""The workflow of `tools` in OpenAI's Agents SDK."""
