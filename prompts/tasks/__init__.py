"""One folder for each task: `task.py` exports `TASK`, and `prompt.md` is its prompt."""
