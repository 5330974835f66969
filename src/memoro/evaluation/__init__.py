"""Evaluation: metrics, calibration, reports, and predictions as files."""
