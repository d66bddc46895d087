"""Files as people have them: how each becomes rows, and how the rows become cases.

Read sources.py (bytes to rows), values.py (rows of JSON, however they are laid out), form.py (what
a form is), then the forms: own.py, chat.py, data_sets.py, table.py, label_studio.py, spans.py.
record.py reads a person's judgment from an object, whatever its keys. prompts/convert.py is the
entry point.
"""
