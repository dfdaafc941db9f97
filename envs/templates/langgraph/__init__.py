"""The workflow of `tools` in LangGraph."""
