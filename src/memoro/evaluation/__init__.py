"""What reads tasks and writes for people: metrics, predictions, tables."""
