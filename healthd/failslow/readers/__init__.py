"""From files of others to series: which reader a file is for, and what it says."""
