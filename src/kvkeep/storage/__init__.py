"""What is on disk: files under one root, entries, their index, locks, names and journal. Free of torch and numpy."""
