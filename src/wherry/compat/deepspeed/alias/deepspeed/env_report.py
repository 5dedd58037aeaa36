def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """`wherry doctor`."""
    from wherry.cli.doctor import main as doctor

    doctor(as_json=False)


cli_main = main
