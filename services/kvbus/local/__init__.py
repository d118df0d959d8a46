"""All of kvbus on one machine: child processes, started in order, watched, and stopped in the reverse order."""
