"""What several programs share: data, records, runs, progress, launching."""
