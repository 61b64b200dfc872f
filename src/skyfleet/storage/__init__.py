"""Storage: atomic local files and folders, and objects in S3."""
