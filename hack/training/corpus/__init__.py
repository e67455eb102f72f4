"""Real text that the locked packages bring: prose, code and conversations, with files held out. No torch."""
