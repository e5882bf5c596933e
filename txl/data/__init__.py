"""The data's walk is one way: text -> vocabulary -> token file -> lanes -> segment."""
