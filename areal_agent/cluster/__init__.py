"""Starting the processes of a run. local.py starts them on this machine."""
