"""The study: one script per DVC stage, each also a command-line program."""
