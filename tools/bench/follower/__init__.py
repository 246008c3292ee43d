"""How soon a served model has what a running job learned, what that costs the job, and what kills change."""
