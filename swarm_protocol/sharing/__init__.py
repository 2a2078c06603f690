"""A checkpoint's files given from member to member: what they are called, where they are kept, how they are fetched."""
