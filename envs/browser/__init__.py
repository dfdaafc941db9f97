"""Small web pages in a real browser: the model sees screenshots, and clicks and types by tools (an extra).

tasks.py     `load`: what is to be done on which page, drawn from a seed; no test task is trained
site.py      `Site`: the pages of one task, and the check, which looks at what was sent to the site
chromium.py  `open_browser`: one Chromium a process, a tab of its own for each rollout, and the tools
workflow.py  `browse`: screenshots and calls, to the reward
"""
