"""What other programs compute at the same place: tables for them, their files read, and where they disagree."""
