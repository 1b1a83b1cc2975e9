"""What to do about a slow job: which remedy, when, and how it is carried out."""
