def get_state_devices(engine, state):
    """The devices on which a state of the engine rests."""
    import torch

    kind = str(getattr(state, "value", state))
    name = {"optim_states": "optimizer", "hp_params": "optimizer", "lp_params": "parameters"}.get(kind, "gradients")
    tier = getattr(engine.placement, name).tier.value
    return {engine.device if tier == "device" else torch.device("cpu")}
