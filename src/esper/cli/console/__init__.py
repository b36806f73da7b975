"""What commands print: tables, progress and figures. Reads results, never a run folder."""
