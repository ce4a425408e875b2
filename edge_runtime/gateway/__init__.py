"""The OpenAI API over HTTP, for programs that already speak it."""
