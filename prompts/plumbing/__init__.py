"""What every part stands on and no task knows of: settings, files, errors, locks, HTTP."""
