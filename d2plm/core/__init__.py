"""What every part of the library stands on; nothing here knows of models, data or runs."""
