"""What every process counts: the list of all metrics, a tally without any library, and the page for Prometheus."""
