"""The package inside the tools that people use; each module imports its host, and nothing else imports it."""
