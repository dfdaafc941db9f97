"""What a run needs of its machine: local.py starts processes, models.py obtains the model folder."""
