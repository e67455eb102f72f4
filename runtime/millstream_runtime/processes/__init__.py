"""How processes of the runtime are started, how they ended, and what they write to."""
