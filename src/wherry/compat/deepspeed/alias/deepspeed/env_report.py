def main(hide_operator_status=False, hide_errors_and_warnings=False):
    """`wherry doctor`."""
    from wherry.cli.doctor import main as doctor

    doctor(as_json=False)


cli_main = main
