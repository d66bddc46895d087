"""Read users' files in other forms: turn a file into rows, and rows into cases.

prompts/convert.py is the entry point. Read sources.py (bytes to rows), values.py (rows of JSON in
any layout), form.py (what a form is), then the forms: own.py, chat.py, data_sets.py, table.py,
label_studio.py, spans.py. record.py reads a person's judgment from an object with any keys.
"""
