"""Tables, figures and pages that draw what other rooms computed: nothing is derived here."""
