"""The package inside the tools that people use; each module imports its host, and nothing else imports it.

Begin with the one of your tool: `transformers`, `lightning` or `timm`.
"""
