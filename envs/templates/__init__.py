"""What `python -m areal_agent.new` copies: environments that run at once, small enough to be rewritten.

Modules import each other relatively, so a copy may have any name. `common` is part of each; `openai_agents` and
`langgraph` are other workflows for the files of `tools`; the template `multi_turn` is `envs/number_game`.
"""
