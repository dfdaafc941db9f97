"""Programs, judged by hidden cases in sandboxes."""
