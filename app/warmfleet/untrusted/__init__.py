"""Code and tables that workers bring, run in processes of their own until they are trusted."""
