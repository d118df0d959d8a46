"""The push matcher: pairs registrations with producers."""
