"""Modules that all folders use and that do not depend on a task: settings, files, errors, HTTP."""
