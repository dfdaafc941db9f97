"""The tools of any MCP server, for a workflow of yours or the one here (an extra).

tools.py     `open_tools`: a server's tools with OpenAI's definitions, and the text that a call returns
workflow.py  `solve`: a conversation with such tools; the answer is compared with the task's
"""
