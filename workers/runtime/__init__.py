"""Process protocol of both engines: environment, spec file, control requests and exits."""
