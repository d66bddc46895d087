"""One folder per task: `task.py` exports `TASK`, `prompt.md` is its prompt."""
