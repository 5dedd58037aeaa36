from wherry.config.fields import Block as DeepSpeedConfigModel
