from wherry.compat.deepspeed.export import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    main,
)

if __name__ == "__main__":
    raise SystemExit(main())
