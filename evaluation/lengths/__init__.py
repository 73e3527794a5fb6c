"""What BABILong and RULER share: texts made of books, asked about by task and by length; scores of each cell."""
