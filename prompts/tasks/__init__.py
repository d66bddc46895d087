"""One module per task, each exporting `TASK`; its prompt is `templates/<name>.md`."""
