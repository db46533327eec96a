"""Array operations of the server, each with one signature and several backends."""
