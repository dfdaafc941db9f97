"""Code that runs inside the judge's sandboxes, beside a program or its tests. The text of each file is sent there.

These files hold no expected output, and what they report is not trusted: a program can do what it likes to its driver.
"""
