"""What the notebooks of each phase compute: evidence to tables and takeaways. No plotting here."""
