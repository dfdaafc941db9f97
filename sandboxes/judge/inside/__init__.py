"""What runs inside the judge's sandboxes, beside a program or its tests. Each file stands alone: its text is sent.

They hold no expected output, and nobody believes what they report: a program may do to its driver what it likes.
"""
