from wherry.config.fields import ConfigBlock as DeepSpeedConfigModel
